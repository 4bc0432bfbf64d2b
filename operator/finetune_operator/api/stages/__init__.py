"""The stages, one file each.

To add a stage, add a file here with its spec and the config of its process, and a field in `api/spec.py`. The planner,
status, conditions, CRD and command line derive the rest from these.
"""
