"""A laptop as a cluster: a Job is a process, a volume is a folder, an eviction is SIGTERM, then SIGKILL.

<workdir>/pipeline.json     the object with its status: what etcd is in a cluster
<workdir>/volumes/…         the pipeline's workspace
<workdir>/claims/NAME       links to the folders given with --claim
<workdir>/jobs/<job>/       one attempt: its order, its log, how it ended; watched over by `runner`
<workdir>/events.jsonl      what was announced
"""
