"""The stock models of the benchmarks have their blocks, and make batches that their forwards take."""

import json
import sys

import pytest
import torch
from integration_common import needs
from test_benchmark_script import ROOT, SCRIPT

MEASURED = ROOT / "docs" / "data"


@needs("transformers", "timm", extra="models", tier="default")
def test_measured_models_have_blocks_and_take_their_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from models import MODELS, model_of

    jobs = [json.loads(file.read_text()) for file in MEASURED.glob("*_models.json")]
    measured = {row["case"].partition(":")[0] for job in jobs for row in job["rows"]}
    for name in MODELS | dict.fromkeys(measured):
        with torch.device("meta"):
            model, blocks, make_batch = model_of(name)(8)
        parts = set(model.modules())
        assert blocks, name
        assert parts.issuperset(blocks), name
        shapes = {key: value.shape[0] for key, value in make_batch(torch.device("meta"), None).items() if value.ndim}
        assert len(set(shapes.values())) == 1, (name, shapes)
    sys.modules.pop("models")
