"""The program of the stage containers: prepare, train, evaluate, push and deploy."""
