"""The operator on a real cluster: installed through its chart, from its built image."""
