"""A manifest with sources on this machine, and the task file that it names."""

TASK = {
    "task": "exam",
    "output_type": "multiple_choice",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
LOCAL = {
    "model": {"uri": "base"},
    "datasets": [{"uri": "data.jsonl"}],
    "push": {"targets": [{"uri": "published"}]},
    "evaluate": {"tasks": [{"name": "exam", "file": "task.yaml"}]},
}
