"""The types of models that can be trained, because they continue a text, by transformers' own tables."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto import modeling_auto as tables
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

TEXT_MODELS = tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
"""Model type -> its class that continues a text."""
USE_ANOTHER = "use a text model with causal attention, such as Llama, Qwen or Mistral"
PARTS = {
    "thinker_config": "a multimodal model",
    "vision_config": "a vision-language model",
    "audio_config": "a speech model",
}
"""Keys of config.json -> the kind of model that has them."""
SPEECH = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES",
)
VISION_LANGUAGE = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",)
MULTIMODAL = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",)
ENCODER_DECODER = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",)
ENCODER = ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",)
IMAGE = (
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
)
KINDS = {
    SPEECH: "a speech model",
    VISION_LANGUAGE: "a vision-language model",
    MULTIMODAL: "a multimodal model",
    ENCODER_DECODER: "an encoder-decoder model",
    ENCODER: "an encoder",
    IMAGE: "an image model",
}
"""Tables of transformers -> the kind of the models in them."""
OTHER_HEAD = re.compile(
    r"For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|RewardModel)$"
)


def model_type_problem(config: Mapping[str, Any]) -> str | None:
    """Return why a model of this type cannot be trained, with the fix; None if it can."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        return "config.json has no model_type: use config.json of a model in Hugging Face format"
    if model_type not in CONFIG_MAPPING_NAMES:
        return _unknown_type_problem(model_type, config)
    kind = _kind(model_type, config)
    if kind is None:
        return None
    return f"is {kind} ({model_type}), which cannot be trained here: {USE_ANOTHER}"


def architecture_problem(config: Mapping[str, Any]) -> str | None:
    """Return the problem of a model whose output head is no language model's; None if there is none."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list):
        return None
    for name in architectures:
        if isinstance(name, str) and OTHER_HEAD.search(name):
            return f"has the output head of another task ({name}): use its base model, which continues a text"
    return None


def _unknown_type_problem(model_type: str, config: Mapping[str, Any]) -> str:
    release = f"transformers {transformers.__version__}"
    if config.get("auto_map"):
        return (
            f"its type {model_type} needs the code in its folder, which is never run: "
            f"use a model whose type {release} has"
        )
    hint = "use a model of another type"
    nearest = difflib.get_close_matches(model_type, TEXT_MODELS, 1, cutoff=0.8)
    if nearest:
        hint += f", or correct config.json if {nearest[0]} was meant"
    return f"its type {model_type} is unknown to {release}: {hint}"


def _kind_beside_text(model_type: str, config: Mapping[str, Any]) -> str | None:
    """Return the kind of a model that could continue a text only with a part of its weights, or without a mask."""
    is_two_part = config.get("is_encoder_decoder")
    # transformers takes the decoder of such a model and drops the encoder.
    if _is_in(model_type, SPEECH) and is_two_part is not False:
        return KINDS[SPEECH]
    if _is_in(model_type, ENCODER_DECODER) and is_two_part is not False:
        return KINDS[ENCODER_DECODER]
    # Without is_decoder every token sees the tokens after it, so there would be nothing to predict.
    if _is_in(model_type, ENCODER) and not config.get("is_decoder"):
        return KINDS[ENCODER]
    return None


def _kind(model_type: str, config: Mapping[str, Any]) -> str | None:
    """Return the kind of a model that cannot be trained; None if the model continues a text."""
    if model_type in TEXT_MODELS:
        return _kind_beside_text(model_type, config)
    for part, kind in PARTS.items():
        if part in config:
            return kind
    for names, kind in KINDS.items():
        if _is_in(model_type, names):
            return kind
    return "a model of another task"


def _is_in(model_type: str, names: tuple[str, ...]) -> bool:
    # A table may be missing in another version of transformers.
    return any(model_type in getattr(tables, name, {}) for name in names)
