"""`finetune resume`: let a suspended pipeline go on."""

from finetune_cli.wishes import wish

DESCRIPTION = """\
Take a suspension back (spec.suspend): the stage that was stopped goes on where it was. NAME is a pipeline on a
cluster; with -n or --context a FILE names it too.
"""

register = wish(
    "resume",
    "let a suspended pipeline go on",
    DESCRIPTION,
    "`finetune run` goes on where it was",
)
