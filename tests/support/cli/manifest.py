"""The shortest valid manifest, as a text."""

MINIMAL = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata:
  name: minimal
spec:
  model: {uri: base}
  datasets: [{uri: data.jsonl}]
"""
