"""The benchmark of casts runs, and has a row for each cast and each layer."""

import json
import tempfile
import unittest
from pathlib import Path

from script_jobs import run_forked

ROOT = Path(__file__).resolve().parents[2]


class TestCastSpeed(unittest.TestCase):
    def test_tiny_run(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "times.json"
            script = str(ROOT / "examples" / "benchmarks" / "cast_speed.py")
            options = ["--tiny", "--device", "cpu", "--repeats", "1", "--compiled", "none", "--json", str(path)]
            options += ["--recipes", "float8_tensorwise", "mxfp8"]
            run = run_forked([script, *options], None, cwd=ROOT)
            self.assertEqual(run.status, 0, run.output)
            content = json.loads(path.read_text())
        names = [(record["recipe"], record["cast"]) for record in content["casts"]]
        self.assertIn(("float8_tensorwise", "both for wgrad"), names)
        self.assertIn(("mxfp8", "shard: quantize, columnwise"), names)
        self.assertTrue(all(isinstance(record["reference"]["ms"], float) for record in content["casts"]))
        self.assertEqual({record["recipe"] for record in content["layers"]}, {"bf16", "float8_tensorwise"})
        self.assertIn("float8_tensorwise", run.output)
