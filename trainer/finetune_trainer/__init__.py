"""What runs inside a stage's container: prepare, train, evaluate, push, deploy."""
