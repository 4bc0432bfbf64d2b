"""Names, labels and keys as an API server accepts them: it would refuse a Job with any other."""

from typing import Annotated

from pydantic import StringConstraints

DNS_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
LABEL_KEY = (
    r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
)
"""A name of at most 63 characters, alone or behind a domain."""
OPTIONAL_LABEL_KEY = f"^({LABEL_KEY[1:-1]})?$"
# The API server compares the domain of an annotation without its case.
ANNOTATION_KEY = LABEL_KEY.replace("[a-z0-9]", "[A-Za-z0-9]").replace(
    "[a-z0-9-]", "[A-Za-z0-9-]"
)
LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$"
# The kubelet would write a key to a file: no path may be hidden in it.
DATA_KEY = r"^[.]?[-_A-Za-z0-9][-._A-Za-z0-9]*$"
"""A key of a Secret or ConfigMap: neither `.` nor a text that begins with `..`."""
VARIABLE_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
VARIABLE_PREFIX = r"^[ -<>-~]*$"
"""Printable ASCII without the equals sign."""
FIELD_PATH = (
    rf"^(metadata\.(name|namespace|uid|(labels|annotations)\['{LABEL_KEY[1:-1]}'\])"
    r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?))$"
)
"""The fields of a pod that a variable may have as its value."""
IMAGE = (
    r"^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?$"
)
"""An image as a container runtime reads it: [HOST/]NAME[:TAG][@DIGEST]."""

ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=DNS_SUBDOMAIN)]
LabelKey = Annotated[str, StringConstraints(max_length=316, pattern=LABEL_KEY)]
OptionalLabelKey = Annotated[
    str, StringConstraints(max_length=316, pattern=OPTIONAL_LABEL_KEY)
]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]
AnnotationKey = Annotated[
    str, StringConstraints(max_length=316, pattern=ANNOTATION_KEY)
]
AnnotationValue = Annotated[str, StringConstraints(max_length=1024)]
VariableName = Annotated[str, StringConstraints(max_length=128, pattern=VARIABLE_NAME)]
VariablePrefix = Annotated[
    str, StringConstraints(max_length=128, pattern=VARIABLE_PREFIX)
]
DataKey = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=DATA_KEY)
]
FieldPath = Annotated[str, StringConstraints(max_length=400, pattern=FIELD_PATH)]
Image = Annotated[str, StringConstraints(max_length=512, pattern=IMAGE)]
