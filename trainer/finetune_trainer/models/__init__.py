"""Load base models and merge adapters into them."""
