"""Capacity types, and the labels, taints and prices of their nodes. A new capacity type is a line of CAPACITIES."""

from collections.abc import Callable
from datetime import date
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from finetune_operator.api.amounts import Amount
from finetune_operator.api.names import LabelValue, OptionalLabelKey
from finetune_operator.api.rules import Rule, WithRules
from finetune_trainer.contract import ContractModel, one_of

SPOT = "Spot"
ON_DEMAND = "OnDemand"
AUTO = "Auto"


class Toleration(WithRules):
    """A taint that the pod tolerates."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="value",
            message="operator Exists matches any value: remove value, or set operator to Equal",
            cel="!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
            is_valid=lambda data: (
                data.get("operator") != "Exists" or not data.get("value")
            ),
        ),
        Rule(
            field="operator",
            message="must be Exists without a key: add key, or set operator to Exists",
            cel="(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
            is_valid=lambda data: (
                bool(data.get("key")) or data.get("operator") == "Exists"
            ),
        ),
        Rule(
            field="effect",
            message="must be NoExecute with tolerationSeconds: set it, or remove tolerationSeconds",
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            is_valid=lambda data: (
                "tolerationSeconds" not in data or data.get("effect") == "NoExecute"
            ),
        ),
    )

    key: OptionalLabelKey | None = None
    """Key of the taint. Absent, with operator Exists: all keys."""
    operator: Literal["", "Equal", "Exists"] = "Equal"
    """Equal compares the value; an empty text is Equal. Exists matches any value."""
    value: LabelValue | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Absent or empty: all effects."""
    # Kubernetes has 64 bits; CEL and JSON compare so many exactly.
    toleration_seconds: int | None = Field(default=None, ge=-(2**53), le=2**53)
    """Seconds for which the pod stays on a node with this taint, for effect NoExecute. Absent: for ever. Zero or less:
    not at all."""


class Nodes(ContractModel):
    """Labels and taints of nodes on this cluster, and annotations of the pods there."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of these nodes."""
    # A selector cannot exclude labels. They become a node affinity.
    excluded_labels: dict[str, str] = Field(default_factory=dict)
    """Labels that these nodes do not have. Needed if nothing else keeps pods away from other nodes."""
    tolerations: tuple[Toleration, ...] = ()
    """Tolerations for the taints of these nodes."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods of Jobs on these nodes. Pods of servers do not get them."""


class NodeClass(Nodes):
    """Nodes of the same capacity type and price. Labels and tolerations of the capacity type are added to their own."""

    name: str = Field(
        min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
    )
    """Name in the status of a pipeline, in metrics and in the list of prices."""
    capacity: Literal["Spot", "OnDemand"]
    """Capacity type of these nodes."""
    accelerator: str | None = None
    """Resource that a stage must ask for to run here, such as nvidia.com/gpu. Absent: stages without an accelerator."""
    price: Annotated[Amount, Field(le=1_000_000)] | None = None
    """Price per hour: of each accelerator, or of a pod without accelerators. Absent: not known."""
    price_date: date | None = None
    """Day on which the price was looked up."""
    interruptions_per_hour: float | None = Field(default=None, ge=0, le=60)
    """Expected interruptions per hour of a pod on these nodes, until a stage has its own experience."""


# Karpenter would otherwise move a training to a cheaper node.
DO_NOT_DISRUPT = {"karpenter.sh/do-not-disrupt": "true"}


class Preset(NamedTuple):
    """Labels and taints of a cloud's nodes."""

    on_demand: Nodes
    spot: Nodes


# docs/guides/placement.md names the page of each cloud that describes these.
PRESETS = {
    # Without labels, so that the first manifest runs on any cluster. Nodes with the taint are spot nodes.
    "generic": Preset(
        Nodes(),
        Nodes(tolerations=(Toleration(key="spot", value="true", effect="NoSchedule"),)),
    ),
    # GKE labels spot nodes, and no others reliably. It taints only spot nodes of Autopilot and of auto-provisioning, so
    # on-demand pods must keep away from the label.
    "gke": Preset(
        Nodes(
            excluded_labels={
                "cloud.google.com/gke-spot": "true",
                "cloud.google.com/gke-preemptible": "true",
            }
        ),
        Nodes(
            node_selector={"cloud.google.com/gke-spot": "true"},
            tolerations=(
                Toleration(
                    key="cloud.google.com/gke-spot", value="true", effect="NoSchedule"
                ),
            ),
        ),
    ),
    # Managed node groups label both capacity types and taint neither.
    "eks": Preset(
        Nodes(node_selector={"eks.amazonaws.com/capacityType": "ON_DEMAND"}),
        Nodes(node_selector={"eks.amazonaws.com/capacityType": "SPOT"}),
    ),
    # Karpenter provisions nodes of the capacity type that a pod selects. It would move a pod to a cheaper node: the
    # annotation keeps it from that, and from nothing that the cloud does.
    "karpenter": Preset(
        Nodes(
            node_selector={"karpenter.sh/capacity-type": "on-demand"},
            annotations=DO_NOT_DISRUPT,
        ),
        Nodes(
            node_selector={"karpenter.sh/capacity-type": "spot"},
            annotations=DO_NOT_DISRUPT,
        ),
    ),
    # AKS labels and taints its spot nodes, and no others.
    "aks": Preset(
        Nodes(),
        Nodes(
            node_selector={"kubernetes.azure.com/scalesetpriority": "spot"},
            tolerations=(
                Toleration(
                    key="kubernetes.azure.com/scalesetpriority",
                    value="spot",
                    effect="NoSchedule",
                ),
            ),
        ),
    ),
}


# Mounted from a ConfigMap into the operator's pod. The kubelet's last copy stays when the API server is away.
class PriceList(ContractModel):
    """Prices of node classes on a day. They replace the prices of the configuration."""

    date: date
    """Day on which the prices were looked up."""
    prices: dict[str, Amount | None]
    """Name of a node class -> its price. null: not known."""


# Configuration of the operator, not of a pipeline: the platform team knows labels and prices, and prices change without
# the manifests. No hash of a stage contains them, so a change stops no Job.
class PlacementDefaults(ContractModel):
    """Meaning of pools and capacity types on this cluster, and prices. Set by the platform team, not by a pipeline."""

    # The generic preset requires no label: the first manifest of a user must run on a new cluster.
    preset: Annotated[str, AfterValidator(one_of(PRESETS))] = "generic"
    """Labels and taints of on-demand and spot nodes that are not set below."""
    # By default a pool means any node: a new cluster has no labels of pools, and its pods would stay pending.
    pools: dict[str, Nodes] = Field(default_factory=dict)
    """Nodes for each kind of stage: control, training, eval, inference. Absent: any node."""
    on_demand: Nodes = Nodes()
    """Nodes that the cloud provider does not reclaim. Empty: the on-demand nodes of the preset."""
    spot: Nodes = Nodes()
    """Cheaper nodes that the cloud provider may reclaim at short notice. Empty: the spot nodes of the preset."""
    node_classes: tuple[NodeClass, ...] = ()
    """Node classes with their prices, tried in the order of price. Absent for a stage: any nodes of the capacity."""
    currency: str = Field(default="USD", min_length=1, max_length=8, pattern=r"^\S+$")
    """Currency of all prices."""
    short_stage_seconds: int = Field(default=1800, ge=0, le=31_536_000)
    """A stage that is expected to run for a shorter time gets on-demand nodes with capacity Auto."""
    restart_seconds: int = Field(default=180, ge=1, le=86_400)
    """Time from the start of an attempt to its first new step, until a stage has its own experience."""
    return_seconds: int = Field(default=1800, ge=1, le=31_536_000)
    """Running time on on-demand nodes after which Auto tries spot again. It doubles with each such attempt."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        # The status, the metrics and the list of prices know a class by its name only.
        names = [node_class.name for node_class in self.node_classes]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(
                f"nodeClasses: the name {min(repeated)} is not unique: rename one of them"
            )
        return self

    def with_prices(self, listed: PriceList) -> Self:
        """Return a copy with the prices of the list; names that are no node class are ignored."""
        classes = tuple(
            _with_price(node_class, listed) for node_class in self.node_classes
        )
        return self.model_copy(update={"node_classes": classes})


def _with_price(node_class: NodeClass, listed: PriceList) -> NodeClass:
    # A listed null says that the price is not known. A class that is not listed keeps its price.
    if node_class.name not in listed.prices:
        return node_class
    price = {"price": listed.prices[node_class.name], "price_date": listed.date}
    return node_class.model_copy(update=price)


CAPACITIES: dict[str, Callable[[PlacementDefaults], Nodes]] = {
    "OnDemand": lambda defaults: _set_or(
        defaults.on_demand, PRESETS[defaults.preset].on_demand
    ),
    "Spot": lambda defaults: _set_or(defaults.spot, PRESETS[defaults.preset].spot),
}
"""Capacity type -> its nodes."""


def _set_or(nodes: Nodes, preset: Nodes) -> Nodes:
    if nodes == Nodes():
        return preset
    return nodes


Capacity = Annotated[
    str,
    AfterValidator(one_of((AUTO, *CAPACITIES))),
    Field(json_schema_extra={"enum": sorted((AUTO, *CAPACITIES))}),
]


class Fallback(ContractModel):
    """When a stage leaves a node class for another of the same capacity, and with Auto then for on-demand nodes."""

    after_interruptions: int | None = Field(default=None, ge=1, le=10)
    """Interruptions in a row on the same node class, each within an hour of its start. Absent: three. With a deadline,
    the time to spare is the only limit."""
    after_pending_seconds: int | None = Field(default=None, ge=1, le=604_800)
    """Time for which a pod has got no node. Absent: ten minutes, or with a deadline most of the time to spare. The time
    doubles when all classes were full. An attempt waits at most 20 minutes if only some of its pods have nodes. Then it
    gives these nodes up."""
    after_fruitless_attempts: int | None = Field(default=None, ge=1, le=10)
    """Interruptions in a row without a new durable step. Absent: three; with a deadline no limit."""


class Placement(ContractModel):
    """Capacity on which the stage's pod runs. Labels and tolerations of your own stand under pod."""

    capacity: Capacity = ON_DEMAND
    """Spot nodes cost less and may be reclaimed at any time; OnDemand nodes are not. Auto chooses for each attempt."""
    expected_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Expected running time of the stage, until it is measured. Auto compares costs and keeps the deadline with it."""
    fallback: Fallback = Fallback()
    """When Auto leaves a node class."""


class TrainPlacement(Placement):
    """Capacity on which the stage's pod runs. Labels and tolerations of your own stand under pod."""

    capacity: Capacity = AUTO
    """Spot nodes cost less and may be reclaimed at any time; OnDemand nodes are not. Auto chooses for each attempt."""
