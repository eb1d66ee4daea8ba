"""Models of the user: a class of transformers, or a function that returns a module on the meta device with inputs."""

from __future__ import annotations

import importlib
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .errors import PlanError
from .model import PRESETS, ModelConfig, known_model
from .recorder import Recorder
from .trace import Trace, record
from .user_tp import communicate, cut, plan_of

_CLASS = re.compile(r"For[A-Z]\w+$|LMHeadModel$")


class _Built(NamedTuple):
    """A fresh module on the meta device, and its loss for one sequence."""

    model: nn.Module
    loss_of: Callable[[nn.Module], torch.Tensor]
    seq_len: int = 0  # tokens of its inputs; 0 if they are none


class UserModel:
    """A model of the user's code: what one rank computes of one sequence, for each size of tp.

    Args:
        build: Rebuilds the module: a recording changes it.
        name: For messages.
        remedy: What to do if forward or backward does not run.
    """

    def __init__(self, build: Callable[[], _Built], name: str, remedy: str) -> None:
        self._build, self._name, self._remedy = build, name, remedy
        self._traces: dict[int, Trace] = {}
        self._refusals: dict[int, str | None] = {}
        built = build()
        self.plan = plan_of(built.model)
        self._given = built.seq_len

    @property
    def seq_len(self) -> int:
        """Tokens of its inputs. Where they have no tokens: the rows that most of its matrices see."""
        if self._given:
            return self._given
        rows = [int(w.flops / (2 * w.numel)) for w in self.trace().weights if w.flops and not w.is_table]
        return max(statistics.mode(rows), 1) if rows else 1

    def trace(self, tp: int = 1) -> Trace:
        """The recording of one rank's slice."""
        if tp not in self._traces:
            self._traces[tp] = self._record(tp)
        return self._traces[tp]

    def refuses(self, tp: int) -> str | None:
        """Why ``tp`` ranks cannot share each layer; None if they can."""
        if tp not in self._refusals:
            self._refusals[tp] = self._refusal(tp)
        return self._refusals[tp]

    def _refusal(self, tp: int) -> str | None:
        reason = self.plan.refuses(tp)
        if reason is not None:
            return reason
        try:
            self.trace(tp)
        except PlanError as error:
            return f"tp: the model's code does not run with slices of its layers ({error})"
        return None

    def _record(self, tp: int) -> Trace:
        model, loss_of, _ = self._build()
        if tp > 1:
            cut(model, self.plan, tp)

        def loss(module: nn.Module, recorder: Recorder) -> torch.Tensor:
            if tp > 1:
                communicate(module, self.plan, recorder)
            return loss_of(module)

        expected = f"a forward and backward that run on the meta device, but {self._name} raised"
        with _errors_of_others(expected, self._remedy):
            return record(lambda: model, loss, is_meta=True)


def load_model(text: str, seq_len: int) -> tuple[str, ModelConfig | None, UserModel | None]:
    """A model by what the user wrote: its name, and its sizes or its code.

    Args:
        text: A preset, a ``config.json``, the name of a class of transformers, or ``module:function``. The function
            returns ``(module, inputs)``: a module on the meta device and the positional arguments of its forward for
            one sequence. What forward returns, or its ``loss``, is summed up for a backward.
        seq_len: Tokens of a sequence, for configurations.

    Raises:
        PlanError: There is no such model, or it cannot be built.
    """
    config = known_model(text)
    if config is not None:
        return config.name, config, None
    if ":" in text:
        return text, None, _recorded(UserModel(_function(text), text, "Mend it."))
    if Path(text).suffix == ".json" or _CLASS.search(text):
        return text, None, _recorded(UserModel(_transformers(text, seq_len), text, "Pass module:function instead."))
    raise PlanError(
        f"model expects one of {', '.join(PRESETS)}, a config.json, the name of a class of transformers or "
        f"module:function, but got {text!r}. Name one of them."
    )


def _recorded(model: UserModel) -> UserModel:
    """The model, of which one rank can compute all."""
    model.trace()
    return model


@contextmanager
def _errors_of_others(expected: str, remedy: str) -> Iterator[None]:
    """Within, code of users or of transformers runs, which may raise anything: it becomes an error of one line."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise PlanError(f"model expects {expected} {type(error).__name__}: {text}. {remedy}") from None


def _function(text: str) -> Callable[[], _Built]:
    module_name, _, name = text.partition(":")
    with _errors_of_others(f"module:function, but {text} cannot be imported:", "Mend it."):
        function = getattr(importlib.import_module(module_name), name)

    def build() -> _Built:
        with _errors_of_others(f"a function that returns (module, inputs), but {text} raised", "Mend it."):
            model, inputs = function()
        if not isinstance(model, nn.Module) or any(not param.is_meta for param in model.parameters()):
            raise PlanError(
                f"model expects {text} to return a module on the meta device, but it did not. Build the module under "
                "torch.device('meta')."
            )
        given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        counts = [t.numel() for t in given if isinstance(t, torch.Tensor) and not t.is_floating_point()]
        cast = [t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given]
        return _Built(model, lambda module: _loss_of(module(*cast)), counts[0] if counts else 0)

    return build


def _loss_of(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    value = output[0] if isinstance(output, tuple | list) else getattr(output, "logits", output)
    return value.sum()  # type: ignore[no-any-return]


_AUTO = ("CausalLM", "Seq2SeqLM", "ImageTextToText", "SpeechSeq2Seq", "MaskedLM", "ImageClassification")


def _transformers(text: str, seq_len: int) -> Callable[[], _Built]:
    try:
        import transformers
    except ImportError:
        raise PlanError(
            f"model needs transformers to build {text}: pip install 'dtensor-gtp[transformers]', or name a preset."
        ) from None

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
                model = _class_of(config, text)(config)
        # A table of positions ends there.
        most = seq_len if _is_rotary(config) else getattr(config, "max_position_embeddings", None) or seq_len
        if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            return causal_language_model(model, min(seq_len, most))
        return _other_model(model, min(seq_len, most))

    return build


def _class_of(config: Any, text: str) -> Callable[[Any], nn.Module]:
    """The class that the configuration names, else the first kind that there is for it."""
    import transformers

    named = [text] if not text.endswith(".json") else list(getattr(config, "architectures", None) or ())
    for name in named:
        found = getattr(transformers, name, None)
        if found is not None and not name.endswith("Model"):
            return found  # type: ignore[no-any-return]
    for kind in _AUTO:
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if type(config) in auto._model_mapping:
            return auto.from_config  # type: ignore[no-any-return]
    raise ValueError(f"no model for {type(config).__name__} has a loss")


def causal_language_model(model: nn.Module, seq_len: int) -> _Built:
    """One step of a language model of transformers on the meta device, with one sequence."""
    model.train()
    takes_mask = _takes_mask(model)

    def loss_of(module: nn.Module) -> torch.Tensor:
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        options: dict[str, Any] = {}
        if takes_mask:
            # A mask of four dims is used as it is; without one, code of transformers asks whether positions are packed.
            options = {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool), "use_cache": False}
        logits = module(tokens, **options).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return _Built(model, loss_of, seq_len)


def _takes_mask(model: nn.Module) -> bool:
    """Whether its attention takes any mask as it is: decoders with rotary positions and one kind of attention."""
    config = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and type(model).__name__.endswith("ForCausalLM") and _is_rotary(config)


def _is_rotary(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta", "rope_scaling"))


def _other_model(model: Any, seq_len: int) -> _Built:
    """One step of a model of images, of speech, or with an encoder: its loss is the sum of what it returns."""
    model.train()
    config = model.config
    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    inputs: dict[str, torch.Tensor] = {}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    if model.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, tuple | list) else (config.image_size,) * 2
        inputs["pixel_values"] = torch.zeros(1, getattr(config, "num_channels", 3), *size, device="meta")
    elif model.main_input_name == "input_features":
        inputs["input_features"] = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions, device="meta")
    else:
        inputs["input_ids"] = tokens
    is_text = "decoder_input_ids" in inputs or "input_ids" in inputs
    floats = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    return _Built(model, lambda module: _loss_of(module(**floats)), seq_len if is_text else 0)
