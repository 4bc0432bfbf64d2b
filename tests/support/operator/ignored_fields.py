"""Manifests with a field that another of their fields leaves without an effect, and the same without that field."""

from typing import Any

from support.operator.scenario import merged

SPEC: dict[str, Any] = {
    "model": {"uri": "hf://org/base"},
    "datasets": [{"uri": "hf://org/data"}],
    "validation": {"fraction": 0.1},
}
CLAIM = {"existingClaim": "shared"}
EXAM = {"tasks": [{"name": "arc_easy"}]}
LOSS = {"tasks": [{"name": "held_out"}]}
ADAPTER = {"targets": [{"uri": "hf://org/a", "format": "Adapter"}]}
MLFLOW = {"uri": "http://mlflow:5000", "registeredModel": "bot"}
LATER = {"deadline": "2040-01-31T08:00:00Z"}


def _placed(capacity: str) -> dict[str, Any]:
    return {"placement": {"capacity": capacity}}


def _without_records(**train: Any) -> tuple[dict[str, Any], str]:
    """Return these fields of train without records for validation, and a part of the message."""
    fields = {"validation": {"fraction": 0}, "train": train}
    return fields, "set validation.fraction above 0"


IGNORED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"workspace.{field}": ({"workspace": {**CLAIM, field: value}}, "existingClaim")
        for field, value in (
            ("size", "10Gi"),
            ("storageClassName", "fast"),
            ("accessMode", "ReadWriteMany"),
            ("whenDeleted", "Delete"),
        )
    },
    "deadline": ({**LATER, "train": _placed("OnDemand")}, "capacity Auto"),
    "prepare.packing": (
        {"train": {"objective": "DPO"}, "prepare": {"packing": False}},
        "remove packing",
    ),
    "train.samples": (
        {"validation": {"fraction": 0}, "train": {"samples": {"prompts": ["a"]}}},
        "set validation.fraction above 0",
    ),
    "train.evalSteps": _without_records(evalSteps=5),
    "train.earlyStopping": _without_records(evalSteps=5, earlyStopping={}),
    "train.optimizer.decayFraction": (
        {"train": {"optimizer": {"scheduler": "Linear", "decayFraction": 1}}},
        "WarmupStableDecay",
    ),
    "train.optimizer.minLearningRateFraction": (
        {
            "train": {
                "optimizer": {"scheduler": "Constant", "minLearningRateFraction": 0.1}
            }
        },
        "set optimizer.scheduler to Cosine",
    ),
    "train.parallelism": ({"train": {"parallelism": "FSDP"}}, "set DDP"),
    **{
        f"evaluate.{field}": ({"evaluate": {**LOSS, **more, field: value}}, "held_out")
        for field, value, more in (
            ("applyChatTemplate", True, {}),
            ("fewshotAsMultiturn", True, {"applyChatTemplate": True}),
            ("systemInstruction", "Be brief.", {}),
            ("batchSize", 4, {}),
        )
    },
    "evaluate.tasks": (
        {"evaluate": {"tasks": [{"name": "held_out", "allowCode": True}]}},
        "allowCode",
    ),
    "push.targets": (
        {"push": {"targets": [{"uri": "s3://bucket/a", "private": False}]}},
        "remove private",
    ),
    "push.dtype": ({"push": {**ADAPTER, "dtype": "FP32"}}, "remove dtype"),
    "tracking.runName": ({"tracking": {"runName": "june"}}, "add mlflow"),
    "tracking.mlflow.registeredModel": ({"tracking": {"mlflow": MLFLOW}}, "add push"),
}
"""Path of the field below spec -> fields of a manifest, and a part of the message."""

USED: dict[str, dict[str, Any]] = {
    "own claim": {"workspace": {"size": "10Gi", "whenDeleted": "Delete"}},
    "prepare is Auto": {
        **LATER,
        "train": _placed("Spot"),
        "prepare": _placed("Auto"),
    },
    "train is Auto": LATER,
    "SFT": {"prepare": {"packing": False}},
    "packing is true": {"train": {"objective": "DPO"}, "prepare": {"packing": True}},
    "records of their own": {
        "validation": {"fraction": None, "uri": "hf://org/more"},
        "train": {"samples": {"prompts": ["a"]}},
    },
    "validations without samples": {"train": {"evalSteps": 5, "earlyStopping": {}}},
    "decay": {
        "train": {"optimizer": {"scheduler": "WarmupStableDecay", "decayFraction": 1}}
    },
    "default of the decay": {
        "train": {"optimizer": {"scheduler": "Linear", "decayFraction": 0.2}}
    },
    "two processes": {"train": {"parallelism": "FSDP", "processesPerNode": 2}},
    "two GPUs": {
        "train": {
            "parallelism": "FSDP",
            "pod": {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        }
    },
    "own program": {"train": {"parallelism": "FSDP", "pod": {"command": ["mine"]}}},
    "one question": {
        "evaluate": {"tasks": [*LOSS["tasks"], *EXAM["tasks"]], "batchSize": 4}
    },
    "public repository": {
        "push": {"targets": [{"uri": "hf://org/a", "private": False}]}
    },
    "merged evaluation": {
        "evaluate": {**EXAM, "weights": "Merged"},
        "push": {**ADAPTER, "dtype": "FP32"},
    },
    "tracker": {"tracking": {"runName": "june", "tensorboard": {}}},
}
"""Fields that have an effect, some of them beside a field that is at its default."""


def spec_with(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a spec with these fields."""
    return merged(SPEC, fields)
