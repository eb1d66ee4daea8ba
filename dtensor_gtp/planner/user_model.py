"""Models of the user: a class of transformers, or a function that returns a module on the meta device with inputs.

For tensor parallelism by the plan of names in a config (``base_model_tp_plan``), linear layers are cut as
``ColwiseParallel`` and ``RowwiseParallel`` cut them, and the model's own code runs with the slices: heads and hidden
columns are fewer, activations between blocks are whole on every rank. The embedding and the head stay whole.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .errors import PlanError, expect
from .model import PRESETS, ModelConfig, config_of_json
from .recorder import Kind, Op, Recorder, through
from .trace import Trace, record

_CLASS = re.compile(r"For[A-Z]\w+$|LMHeadModel$")


class _Built(NamedTuple):
    """A fresh module on the meta device, and its loss for one sequence."""

    model: nn.Module
    loss_of: Callable[[nn.Module], Tensor]
    seq_len: int = 0  # tokens of its inputs; 0 if they are none


class UserModel:
    """A model of the user's code: what one rank computes of one sequence, for each size of tp. ``build`` is called for
    each, since a recording changes the module; ``remedy`` is what to do if forward or backward does not run."""

    # Where ``ModelConfig`` has sizes: it is one stage, and what is in it is not known.
    layers = 1
    kinds: Sequence[bool] = ()
    experts = experts_per_token = 0

    def __init__(self, build: Callable[[], _Built], name: str, remedy: str) -> None:
        self.name = name
        self._build = build
        self._remedy = remedy
        self.trace, self.refuses = functools.cache(self._record), functools.cache(self._refuses)
        built = build()
        self.plan = plan_of(built.model)
        self.seq_len = built.seq_len
        if not self.seq_len:  # it has no tokens: the rows that most of its matrices see
            rows = [int(w.flops / (2 * w.numel)) for w in self.trace(1).weights if w.flops and not w.is_table]
            self.seq_len = max(statistics.mode(rows or [1]), 1)

    def _refuses(self, tp: int) -> str | None:
        """Why ``tp`` ranks cannot share each layer; None if they can."""
        if tp > 1 and self.plan.refusal:
            return f"tp: {self.plan.refusal}"
        bad = next((number for number in self.plan.sizes if number % tp), None)
        if bad is not None:
            return f"tp {tp} does not divide {bad} heads, rows or columns of a layer"
        try:
            self.trace(tp)
        except PlanError as error:
            return f"tp: the model's code does not run with slices of its layers ({error})"
        return None

    def _record(self, tp: int) -> Trace:
        model: Any
        model, loss_of, _ = self._build()
        if getattr(model, "_can_set_experts_implementation", bool)():  # "eager" is a loop over what tokens have chosen
            model.config._experts_implementation = "grouped_mm"
        styles: Mapping[str, str] = {}
        if tp > 1:
            styles = self.plan.styles
        for name, style in styles.items():
            layer = model.get_submodule(name)
            if style == COLWISE:
                layer.out_features //= tp
            else:
                layer.in_features //= tp
            weight = layer.weight
            bias = layer.bias
            shape = layer.out_features, layer.in_features
            layer.weight = nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)
            if bias is not None:
                layer.bias = nn.Parameter(bias.new_empty(layer.out_features), requires_grad=bias.requires_grad)

        def loss(module: nn.Module, recorder: Recorder) -> Tensor:
            for name, style in styles.items():
                layer = module.get_submodule(name)
                layer.forward = partial(_communicate, layer.forward, recorder, style)
            return loss_of(module)

        expected = f"a forward and backward that run on the meta device, but {self.name} raised"
        with _errors_of_others(expected, self._remedy):
            return record(lambda: model, loss)


def load_model(text: str, seq_len: int) -> ModelConfig | UserModel:
    """A model by what the user wrote, see :func:`plan`."""
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = Path(text)
    if os.path.isdir(text):  # false, too, of a name that no file can have
        path /= "config.json"
    if path.suffix == ".json" and (config := config_of_json(path)) is not None:
        return config
    if ":" in text:
        model = UserModel(_function(text), text, "Mend it.")
    else:
        names = f"{', '.join(PRESETS)}, a config.json, the name of a class of transformers or module:function"
        is_known = Path(text).suffix == ".json" or _CLASS.search(text)
        expect(is_known, f"model expects one of {names}", f"got {text!r}. Name one of them.")
        model = UserModel(_transformers(text, seq_len), text, "Pass module:function instead.")
    model.trace(1)  # one rank can compute all of it
    return model


@contextmanager
def _errors_of_others(expected: str, remedy: str) -> Iterator[None]:
    """Within, code of users or of transformers runs, which may raise anything: it becomes an error of one line."""
    try:
        yield
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:200]
        raise PlanError(f"model expects {expected} {type(error).__name__}: {text}. {remedy}") from None


def _function(text: str) -> Callable[[], _Built]:
    module_name, _, name = text.partition(":")
    with _errors_of_others(f"module:function, but {text} cannot be imported:", "Mend it."):
        function = getattr(importlib.import_module(module_name), name)

    def build() -> _Built:
        with _errors_of_others(f"a function that returns (module, inputs), but {text} raised", "Mend it."):
            model, inputs = function()
        is_meta = isinstance(model, nn.Module) and all(param.is_meta for param in model.parameters())
        wrong = "it did not. Build the module under torch.device('meta')."
        expect(is_meta, f"model expects {text} to return a module on the meta device", wrong)
        given = (inputs,)
        if isinstance(inputs, tuple | list):
            given = tuple(inputs)
        num_tokens = 0  # of the first ids
        cast = list(given)
        for place, value in enumerate(given):
            if isinstance(value, Tensor) and value.is_floating_point():
                cast[place] = value.bfloat16()
            elif isinstance(value, Tensor):
                num_tokens = num_tokens or value.numel()
        return _Built(model, lambda module: _loss_of(module(*cast)), num_tokens)

    return build


def _loss_of(output: Any) -> Tensor:
    """What is summed up for a backward."""
    if (loss := getattr(output, "loss", None)) is not None:
        return loss  # type: ignore[no-any-return]
    if isinstance(output, tuple | list):
        value = output[0]
    else:
        value = getattr(output, "logits", output)
    return value.sum()  # type: ignore[no-any-return]


_AUTO = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "SpeechSeq2Seq", "MaskedLM", "ImageClassification")


def _transformers(text: str, seq_len: int) -> Callable[[], _Built]:
    try:
        import transformers
    except ImportError:
        install = "pip install 'dtensor-gtp[transformers]', or name a preset."
        raise PlanError(f"model needs transformers to build {text}: {install}") from None

    def build() -> _Built:
        with _errors_of_others(f"a model that trains, but transformers cannot build {text}:", "Name another."):
            if text.endswith(".json"):
                config = transformers.AutoConfig.from_pretrained(text)
            else:
                config = getattr(transformers, text).config_class()
            if getattr(config, "num_experts_per_tok", 0) is None:  # the default of DeepSeek-V2, which cannot run
                raise ValueError("it has no num_experts_per_tok: take the config.json of a trained model")
            config.use_cache = False
            with torch.device("meta"):
                model = _class_of(transformers, config, text)(config)
        # A table of positions ends there.
        if _is_rotary(config):
            most = seq_len
        else:
            most = getattr(config, "max_position_embeddings", None) or seq_len
        expected = f"a configuration with the sizes of its inputs, but {text} raised"
        with _errors_of_others(expected, "Pass module:function instead."):
            return step_of(model, min(seq_len, most))

    return build


def _class_of(transformers: Any, config: Any, text: str) -> Callable[[Any], nn.Module]:
    """The class that the configuration names, else the first kind that there is for it."""
    if not text.endswith(".json"):
        named = [text]
    else:
        named = list(getattr(config, "architectures", None) or ())
    for name in named:
        found = getattr(transformers, name, None)
        if found is not None and not name.endswith("Model"):
            return found  # type: ignore[no-any-return]
    for kind in _AUTO[config.is_encoder_decoder :]:  # the first kind would leave out an encoder
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if type(config) in auto._model_mapping:
            return auto.from_config  # type: ignore[no-any-return]
    raise ValueError(f"no model for {type(config).__name__} has a loss")


def step_of(model: Any, seq_len: int) -> _Built:
    """One step with one sequence. The loss of other models than causal ones of text is the sum of what they return."""
    model.train()
    config = model.config
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        # Decoders with rotary positions and one kind of attention take any mask as it is.
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        takes_mask = kinds == {"full_attention"} and name.endswith("ForCausalLM") and _is_rotary(config)

        def loss_of(module: nn.Module) -> Tensor:
            tokens = torch.zeros(1, seq_len, dtype=torch.int64)
            options: dict[str, Any] = {}
            if takes_mask:
                # One of four dims is used as it is; without one, their code asks whether positions are packed.
                options = {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool), "use_cache": False}
            logits = module(tokens, **options).logits.float()
            return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        return _Built(model, loss_of, seq_len)
    inputs: dict[str, Tensor] = {}
    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    if model.main_input_name == "pixel_values":
        if isinstance(config.image_size, tuple | list):
            size = config.image_size
        else:
            size = (config.image_size,) * 2
        inputs["pixel_values"] = torch.zeros(1, getattr(config, "num_channels", 3), *size, device="meta").bfloat16()
    elif model.main_input_name == "input_features":
        shape = 1, config.num_mel_bins, 2 * config.max_source_positions
        inputs["input_features"] = torch.zeros(shape, device="meta").bfloat16()
    else:
        inputs["input_ids"] = tokens
    num_tokens = 0  # of images and sound it is not known
    if any(value is tokens for value in inputs.values()):
        num_tokens = seq_len
    return _Built(model, lambda module: _loss_of(module(**inputs)), num_tokens)


def _is_rotary(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta", "rope_scaling"))


COLWISE = "colwise"
ROWWISE = "rowwise"


class TPPlan(NamedTuple):
    styles: Mapping[str, str]  # "colwise" or "rowwise" by the name of the layer
    sizes: tuple[int, ...] = ()  # that tp must divide: heads, those of keys and values, rows or columns
    refusal: str = ""  # why the model cannot be cut; empty if it can


def plan_of(model: nn.Module) -> TPPlan:
    """The plan of a model as transformers builds it."""
    config: Any = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return TPPlan({}, refusal="the model has no config with a base_model_tp_plan")
    # Norms of heads stay whole on all ranks, whatever their style is called.
    plan = {name: style for name, style in plan.items() if not style.startswith(("replicated", "sequence"))}
    other = next((name for name, style in plan.items() if style not in (COLWISE, ROWWISE)), None)
    if other is not None:
        return TPPlan({}, refusal=f"base_model_tp_plan has {plan[other]!r} for {other}, not colwise or rowwise")
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix):
        prefix = f"{prefix}."
    else:
        prefix = ""
    patterns = {re.escape(prefix + name).replace(r"\*", r"\d+"): style for name, style in plan.items()}
    matches = ((pattern, name) for name, _ in model.named_modules() for pattern in patterns)
    styles = {name: patterns[pattern] for pattern, name in matches if re.fullmatch(pattern, name)}
    sizes = []
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            kind = type(module).__name__
            return TPPlan({}, refusal=f"base_model_tp_plan cuts {name}, which is no nn.Linear ({kind})")
        if style == COLWISE:
            sizes.append(module.out_features)
        else:
            sizes.append(module.in_features)
    heads = getattr(config, "num_attention_heads", 1)
    groups = getattr(config, "num_key_value_heads", None) or heads
    return TPPlan(styles, (heads, groups, *sorted(set(sizes))))


def _communicate(forward: Callable[..., Any], recorder: Recorder, style: str, input: Tensor) -> Any:
    """Row-wise layers all-reduce their output, column-wise ones their input's gradient: as a scatter and a gather."""

    def reduce(nbytes: int) -> None:
        for _ in range(2):
            recorder.note(Op(Kind.TP, nbytes=nbytes))

    if style == COLWISE:
        return forward(through(input, partial(reduce, input.nbytes)))
    output = forward(input)
    reduce(output.nbytes)
    return through(output, lambda: None)
