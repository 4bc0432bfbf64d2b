"""The stages, one file each.

Adding one is a file here, with what users may write and what its process is told, and a line in
`api/spec.py`; planner, status, conditions, CRD and command line take it from there.
"""
