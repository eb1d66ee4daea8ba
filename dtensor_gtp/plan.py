"""``python -m dtensor_gtp.plan``. The name ``dtensor_gtp.plan`` is the function: this module puts it in its place."""

import sys

from dtensor_gtp.planner.api import plan
from dtensor_gtp.planner.command_line import main

if __name__ == "__main__":
    sys.exit(main())
# ``import dtensor_gtp.plan`` would otherwise replace the package's function by this module.
sys.modules[__name__] = plan  # type: ignore[assignment]
