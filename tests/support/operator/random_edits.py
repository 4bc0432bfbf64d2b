"""Edits of a pipeline, and the nodes on which it runs, for random events."""

from finetune_operator.api.conditions import Reason
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.core.observation import Blocker
from finetune_operator.core.settings import Settings

PUSH = {"targets": [{"uri": "pvc://models/demo"}]}
DEPLOY = {"deploy": {}, "push": PUSH, "evaluate": {"tasks": [{"name": "exam"}]}}
GATE = {"task": "exam", "value": 0.6}
EDITS = (
    {"suspend": True},
    {"suspend": False},
    {"seed": 1},
    {"seed": 0},
    {"train": {"lora": {"rank": 4}}},
    {"train": {"lora": {"rank": 8}}},
    {"train": {"pod": {"resources": {"limits": {"memory": "64Gi"}}}}},
    {"train": {"pod": {"resources": {"limits": {"memory": "32Gi"}}}}},
    {"train": {"maxRuntimeSeconds": 50}},
    {"train": {"maxRuntimeSeconds": None}},
    {"train": {"maxFailures": 0, "maxInterruptions": 0}},
    {"train": {"maxFailures": 9, "maxInterruptions": 9}},
    {"evaluate": {"gates": [{**GATE, "value": 0.9}]}},
    {"evaluate": {"gates": [{**GATE, "metric": "f1"}]}},
    {"evaluate": {"gates": [{**GATE, "standardErrors": 2}]}},
    {"evaluate": {"gates": [GATE, {**GATE, "operator": "LessThan", "value": 0.9}]}},
    {"push": {"when": "GatesPassed"}},
    {"push": {"when": "Always"}, "deploy": {"when": "Always"}},
    {"push": None, "deploy": None},
    {"evaluate": None, "push": None, "deploy": None},
    {**DEPLOY, "deploy": {"when": "Always"}},
    {"maxRuntimeSeconds": 200},
    {"maxRuntimeSeconds": None},
    {"ttlSecondsAfterFinished": 1000},
    {"ttlSecondsAfterFinished": None},
    {"deadline": "2030-01-01T02:00:00Z"},
    {"deadline": None},
    *(
        {"train": {"placement": {"capacity": capacity}}}
        for capacity in ("Spot", "OnDemand", "Auto")
    ),
    {"train": {"placement": {"expectedSeconds": 5000}}},
)
PRICES = (
    ("a", "Spot", "0.80"),
    ("b", "Spot", "0.90"),
    ("c", "OnDemand", "3.10"),
    ("d", "OnDemand", None),
)
NODE_CLASSES = [
    {"name": name, "capacity": capacity, "price": price}
    for name, capacity, price in PRICES
]
SETTINGS = Settings(
    placement_defaults=PlacementDefaults.model_validate({"nodeClasses": NODE_CLASSES})
)
NO_NODE = Blocker(Reason.WAITING_FOR_CAPACITY, "0/3 nodes are available")
