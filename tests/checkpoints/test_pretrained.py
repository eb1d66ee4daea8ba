"""Whole models in safetensors: each rank reads its own rows, and what is written is what the model has."""

import copy
import json
import struct
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from checkpoint_common import make, shard
from common import ALL, GlooTest, assert_same_params, full, shared_directory
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import _safetensors, gtp_shard, init_weight_mesh, quantize_
from dtensor_gtp.pretrained import load_pretrained, save_pretrained


def write(path: Path, tensors: dict[str, torch.Tensor], padding: int = 0) -> None:
    """A file as others write it; ``padding`` bytes of spaces end its header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(own)]
        header[name] = {"dtype": _safetensors.NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += own
    text = json.dumps(header).encode() + b" " * padding
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.inverse.copy_(torch.arange(4) * 2.0)  # type: ignore[operator]


class TestLoadPretrained(GlooTest):
    def test_from_the_meta_device_each_rank_reads_its_rows(self) -> None:
        """Uneven and blocked rows, columns, ties, a buffer; in files of any alignment, of another dtype, on two meshes.
        What is read is what the rank holds, element for element."""
        reference = make(seed=1)
        state = {key: value for key, value in reference.state_dict().items() if key != "head.weight"}  # tied
        for mesh, padding in ((self.gtp_mesh(), 0), (self.hsdp_mesh(), 3)):
            with shared_directory() as folder:
                if self.rank == 0:
                    write(folder / "model.safetensors", state, padding)
                dist.barrier()
                with torch.device("meta"):
                    model = make(seed=2)
                model = shard(model, mesh)
                read = 0
                region = _safetensors.region_of

                def counting(*args: Any, region: Any = region) -> torch.Tensor:
                    nonlocal read
                    part: torch.Tensor = region(*args)
                    read += part.numel()
                    return part

                with mock.patch.object(_safetensors, "region_of", counting):
                    self.assertEqual(load_pretrained(model, folder), ())
            self.assertIs(model.head.weight, model.embedding.weight)
            assert_same_params(model, reference, rtol=0.0, atol=0.0)
            self.assertEqual(model.scale, reference.scale)
            held = sum(param.to_local().numel() for param in model.parameters())
            self.assertEqual(read, held + model.scale.numel())

    def test_casts_several_files_and_tensor_parallelism(self) -> None:
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
        mesh = init_weight_mesh("cpu", gtp=2, tp=2)
        with shared_directory() as folder:
            if self.rank == 0:
                halves = {f"net.{name}": p.detach().bfloat16() for name, p in reference.named_parameters()}
                first = dict(list(halves.items())[:1])
                rest = dict(list(halves.items())[1:]) | {"net.unknown": torch.ones(2)}
                write(folder / "a.safetensors", first, padding=1)
                write(folder / "b.safetensors", rest)
                index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(rest, "b.safetensors")
                (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
            dist.barrier()
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}, src_data_rank=None)
            gtp_shard(model, mesh["gtp"], schedule=ALL)
            unused = load_pretrained(model, folder, rename=lambda name: f"net.{name}")
        self.assertEqual(unused, ("net.unknown",))
        assert_same_params(model, reference.bfloat16().float(), rtol=0.0, atol=0.0)

    def test_native_weights_are_quantized(self) -> None:
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(64, 128, bias=False)).requires_grad_(False)
        model = gtp_shard(quantize_(copy.deepcopy(reference), "mxfp8", storage="native"), self.gtp_mesh(), schedule=ALL)
        expected = full(model[0].weight)
        with torch.no_grad():
            reference[0].weight.mul_(2)
        with shared_directory() as folder:
            if self.rank == 0:
                write(folder / "model.safetensors", dict(reference.state_dict()))
            dist.barrier()
            load_pretrained(model, folder)
        self.assertEqual(full(model[0].weight), 2 * expected)

    def test_buffers_that_no_file_has(self) -> None:
        with shared_directory() as folder:
            if self.rank == 0:
                write(folder / "model.safetensors", {"0.weight": torch.ones(8, 8)})
            dist.barrier()
            for is_computed in (True, False):
                with torch.device("meta"):
                    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Module())
                    if is_computed:
                        model[1] = Rotary()
                    else:
                        model[1].register_buffer("inverse", torch.empty(4), persistent=False)
                model.register_buffer("given", torch.arange(3.0), persistent=False)  # not on the meta device
                gtp_shard(model, self.gtp_mesh(), schedule=ALL)
                if is_computed:
                    load_pretrained(model, folder)
                    self.assertEqual(model[1].inverse, torch.arange(4) * 2.0)
                    self.assertEqual(model.given, torch.arange(3.0))
                else:
                    with self.assertRaisesRegex(ValueError, r"cannot recompute the buffers of '1' \(Module\)"):
                        load_pretrained(model, folder)

    def test_refusals(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8)), self.gtp_mesh(), schedule=ALL)
        native = quantize_(nn.Sequential(nn.Linear(8, 8)), "float8_rowwise", storage="native")
        native = gtp_shard(native, self.gtp_mesh(), schedule=ALL)
        with shared_directory() as folder:
            if self.rank == 0:
                write(folder / "names.safetensors", {"model.0.weight": torch.ones(8, 8), "0.bais": torch.ones(8)})
                write(folder / "shapes.safetensors", {"0.weight": torch.ones(9, 8), "0.bias": torch.ones(8)})
                whole = (folder / "names.safetensors").read_bytes()
                (folder / "cut.safetensors").write_bytes(whole[:-4])
                (folder / "text.safetensors").write_bytes(b"hello")
                scaled = {"0.weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "0.weight_scale_inv": torch.ones(1, 1)}
                write(folder / "scaled.safetensors", scaled | {"0.bias": torch.ones(8)})
            dist.barrier()
            for name, error in (
                (
                    "names",
                    r"2 tensors .*'0.weight', did you mean 'model.0.weight'\?; '0.bias', did you mean '0.bais'\?",
                ),
                ("shapes", r"'0.weight' of shape \(8, 8\).* has one of shape \(9, 8\)"),
                ("cut", "damaged or cut off: '0.bais'"),
                ("text", "is no safetensors file"),
                ("scaled", "'0.weight' as torch.float32 or .* has torch.float8_e4m3fn.*dequantize them first"),
            ):
                for each in (model, native) if name == "scaled" else (model,):
                    with self.assertRaisesRegex(ValueError, error):
                        load_pretrained(each, folder / f"{name}.safetensors")
            with self.assertRaisesRegex(FileNotFoundError, "no folder with such files"):
                load_pretrained(model, folder / "nothing")
            partly = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
            partly = gtp_shard(partly, self.gtp_mesh(), schedule=ALL)
            with self.assertRaisesRegex(ValueError, "all parameters of .* on the meta device, or none, but 2 of 4 are"):
                load_pretrained(partly, folder / "shapes.safetensors")

    def test_dtypes_that_the_format_has_no_name_for(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8)), self.gtp_mesh(), schedule=ALL)
        with shared_directory() as folder:
            with self.assertRaisesRegex(ValueError, "'0.weight': .* no name for torch.float8_e4m3fnuz. Pass another"):
                save_pretrained(model, folder, dtype=torch.float8_e4m3fnuz)
            model[0].register_buffer("turns", torch.ones(2, dtype=torch.complex128))
            # Of ``dtype=`` only floating-point tensors are cast.
            for dtype in (None, torch.float32):
                with self.assertRaisesRegex(ValueError, "'0.turns': .* for torch.complex128. .* convert other"):
                    save_pretrained(model, folder, dtype=dtype)
            self.assertEqual(list(folder.iterdir()), [])
            dist.barrier()
            model[0].turns = model[0].turns.to(torch.complex64)
            save_pretrained(model, folder)
            self.assertEqual(load_pretrained(model, folder), ())

    def test_what_is_written_is_what_the_model_has(self) -> None:
        """In one file and in several, in another dtype; and the format's own library reads the same."""
        model = shard(make(seed=3), self.gtp_mesh())
        for options, names in (({}, ["model.safetensors"]), ({"max_file_nbytes": 400, "dtype": torch.bfloat16}, None)):
            with shared_directory() as folder:
                save_pretrained(model, folder, **options)
                files = sorted(path.name for path in folder.glob("*.safetensors"))
                self.assertEqual(files, names or [f"model-{k + 1:05}-of-{len(files):05}.safetensors" for k in range(2)])
                again = shard(make(seed=4), self.gtp_mesh())
                self.assertEqual(load_pretrained(again, folder), ())
                if find_spec("safetensors") is not None:
                    from safetensors.torch import load_file

                    read = {key: value for name in files for key, value in load_file(folder / name).items()}
                    state = {key: value for key, value in make(seed=3).state_dict().items() if key in read}
                    self.assertEqual(read, {key: value.to(read[key].dtype) for key, value in state.items()})
            expected = make(seed=3)
            for param in expected.parameters():
                param.data = param.data.to(options.get("dtype", param.dtype)).to(param.dtype)  # type: ignore[arg-type]
            assert_same_params(again, expected, rtol=0.0, atol=0.0)
            self.assertIsInstance(again.linear.weight, DTensor)

    def test_a_save_replaces_an_earlier_one_in_the_folder(self) -> None:
        """From several files to one, to fewer, and back; what others have put there stays."""
        one, two, three = {}, {"max_file_nbytes": 1000}, {"max_file_nbytes": 700}
        with shared_directory() as folder:
            if self.rank == 0:
                write(folder / "model-ema.safetensors", {})
            dist.barrier()
            for seed, options in enumerate((three, two, one, two, one)):
                save_pretrained(shard(make(seed), self.gtp_mesh()), folder, **options)
                count = {1000: 2, 700: 3}.get(options.get("max_file_nbytes", 0), 1)
                expected = {f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)}
                expected |= {"model.safetensors.index.json"}
                if options is one:
                    expected = {"model.safetensors"}
                self.assertEqual({file.name for file in folder.iterdir()}, expected | {"model-ema.safetensors"})
                loaded = shard(make(seed + 1), self.gtp_mesh())
                load_pretrained(loaded, folder)
                assert_same_params(loaded, make(seed), rtol=0.0, atol=0.0)
                dist.barrier()

    def test_a_save_that_fails_leaves_the_earlier_one(self) -> None:
        with shared_directory() as folder:
            for options in ({}, {"max_file_nbytes": 1000}):
                save_pretrained(shard(make(1), self.gtp_mesh()), folder, **options)
                model = shard(make(2), self.gtp_mesh())
                for again in ({}, {"max_file_nbytes": 1000}):
                    with (
                        mock.patch.object(DTensor, "full_tensor", side_effect=OSError("cut off")),
                        self.assertRaisesRegex(OSError, "cut off"),
                    ):
                        save_pretrained(model, folder, **again)
                    dist.barrier()
                    loaded = shard(make(3), self.gtp_mesh())
                    load_pretrained(loaded, folder)
                    assert_same_params(loaded, make(1), rtol=0.0, atol=0.0)

    @pytest.mark.long
    @unittest.skipIf(find_spec("transformers") is None, "needs transformers")
    def test_a_model_of_transformers(self) -> None:
        """From its own files to the meta device and back, with rotary buffers that no file has."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
        config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True)
        tokens = torch.arange(8)[None]
        with shared_directory() as folder:
            torch.manual_seed(0)
            reference = AutoModelForCausalLM.from_config(config)
            if self.rank == 0:
                reference.save_pretrained(folder / "theirs")
            dist.barrier()
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            gtp_shard(model, self.gtp_mesh(), schedule=ALL)
            self.assertEqual(load_pretrained(model, folder / "theirs"), ())
            expected = reference(tokens).logits
            torch.testing.assert_close(model(tokens).logits, expected)
            save_pretrained(model, folder / "ours")
            if self.rank == 0:
                config.save_pretrained(folder / "ours")
                again = AutoModelForCausalLM.from_pretrained(folder / "ours")
                self.assertTrue(torch.equal(again(tokens).logits, expected))
