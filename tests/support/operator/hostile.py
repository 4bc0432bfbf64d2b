"""Hostile values for every string field of the CRD's schema."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from support.operator.built_objects import ROOT, load_manifest

Object = dict[str, Any]
Path = tuple[str | int, ...]
KEY = "<key>"
"""Last element of a path: the name of an entry of a map."""
FREE = "hostPath"
"""Last element of a path: a field of an object whose content the CRD leaves open."""
LISTS = {
    "env",
    "envFrom",
    "ignored",
    "tolerations",
    "imagePullSecrets",
    "command",
    "args",
    "targetModules",
    "tasks",
    "gates",
    "targets",
}
"""Fields that are lists."""
VALUES = (
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
    "/etc/shadow",
    "../../../../etc",
    "..",
    "victim/key",
    "victim.key",
    "system:serviceaccount:kube-system:default",
    "$(FINETUNE_CONFIG)",
    "$(A)$(B",
    "x$(",
    "pvc://victim/key/model",
    "pvc://claim",
    "pvc://claim/../../../proc/1/root",
    "pvc://../victim/key",
    "pvc://a..b/c",
    "file:///var/run/secrets/kubernetes.io/serviceaccount/token",
    "hf://org/name/../../victim",
    "secret://victim/key",
    "k8s://victim/secrets/key",
    "https://kubernetes.default.svc/api/v1/namespaces/victim/secrets",
    "hostPath:/etc",
    'x", "hostNetwork": true, "y": "',
    "x\nhostNetwork: true",
    "{{ .Release.Namespace }}",
)


def string_fields(
    schema: Mapping[str, Any], sample: Any, path: Path = ()
) -> Iterator[Path]:
    """Yield the paths of all strings without an enum in a schema.

    An item of a list has the index 0, and the name of a map's entry is KEY. An entry itself has its name in the sample.
    """
    for name, field in schema.get("properties", {}).items():
        yield from string_fields(field, (sample or {}).get(name), (*path, name))
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        # Without properties it is a scalar of any type.
        yield path if schema.get("maxProperties") == 0 else (*path, FREE)
    values = schema.get("additionalProperties")
    if values:
        yield (*path, KEY)
        name = next(iter(sample or {"entry": None}))
        yield from string_fields(values, (sample or {}).get(name), (*path, name))
    items = schema.get("items")
    if items:
        yield from string_fields(items, next(iter(sample or ()), None), (*path, 0))
    if (
        schema.get("type") == "string" or schema.get("x-kubernetes-int-or-string")
    ) and "enum" not in schema:
        yield path


def spec_schema() -> Object:
    """Return the schema of the spec in the CRD."""
    crd = yaml.safe_load((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    [version] = crd["spec"]["versions"]
    spec: Object = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def full_spec() -> Object:
    """Return a spec in which every field is set, and every stage has a program of the user."""
    spec: Object = load_manifest(ROOT / "tests" / "data" / "everything.yaml")["spec"]
    return spec


def trainers_spec() -> Object:
    """Return the same spec, in which the trainer runs all stages and the operator creates the workspace."""
    spec = full_spec()
    spec["workspace"] = {
        "size": "200Gi",
        "storageClassName": "fast",
        "accessMode": "ReadWriteMany",
        "whenDeleted": "Delete",
    }
    for field in spec.values():
        if isinstance(field, dict) and "pod" in field:
            del field["pod"]["image"], field["pod"]["command"], field["pod"]["args"]
    return spec


def with_value(spec: Object, path: Path, value: str) -> Object:
    """Return a copy of the spec with the value at the path. If the path ends in KEY, the value names a map's entry."""
    # Only the objects on the path are copied: thousands of specs are made.
    changed = copy.copy(spec)
    *parents, last = path
    target: Any = changed
    for name in parents:
        target = _child(target, name)
    if last == KEY:
        target[value] = copy.deepcopy(next(iter(target.values()), "x"))
    elif isinstance(last, int):
        target[:] = [value]
    else:
        target[last] = value
    return changed


def _child(target: Any, name: str | int) -> Any:
    """Replace a child of a list or an object by a copy, and return it. An absent child is created."""
    if isinstance(target, list):
        child: Any = copy.copy(target[0]) if target else {}
        target[:1] = [child]
        return child
    absent: Any = [] if name in LISTS else {}
    child = copy.copy(target.get(name, absent))
    target[name] = child
    return child
