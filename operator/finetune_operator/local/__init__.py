"""A cluster on one machine. A Job is a process, a volume is a folder, and an eviction is SIGTERM, then SIGKILL.

<workdir>/pipeline.json     the object with its status, which in a cluster is in etcd
<workdir>/volumes/…         the pipeline's workspace
<workdir>/claims/NAME       links to the folders given with --claim
<workdir>/jobs/<job>/       one attempt: its job.json, its log and how it ended; written by `cluster` and `runner`
<workdir>/events.jsonl      the events
"""
