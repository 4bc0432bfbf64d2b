"""The Hugging Face hub: models and data sets are read from it, models are pushed to it."""
