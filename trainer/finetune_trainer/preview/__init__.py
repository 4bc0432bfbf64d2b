"""Preview of the data, as `prepare` would read it: `python -m finetune_trainer.preview`."""
