"""The memory that a process of a training needs, as `finetune plan` prints it."""

from finetune_trainer.contract.models import ContractModel


class MemoryEstimate(ContractModel):
    """Bytes on the device of a process, at the fullest moment of a step whose rows are full and learned in full."""

    parameters: int
    """Number of the base model's weights."""
    trained_parameters: int
    """Number of the weights that are trained."""
    frozen_weights: int
    """Bytes of the weights that are not trained."""
    trained_weights: int
    gradients: int
    optimizer: int
    """Bytes of the optimizer's state."""
    activations: int | None = None
    """Bytes of the tensors that a step makes and frees again. Absent: a step of this model cannot be simulated."""
    activations_unknown: str = ""
    """Why a step cannot be simulated."""
    copies: int
    """Bytes of the copies that a checkpoint is written from. On a GPU they are in the memory of its machine."""
    device_bytes: int | None = None
    """Memory of a GPU of this machine; absent without a GPU."""

    @property
    def total(self) -> int:
        """The bytes of all parts on the device that are known."""
        parts = (
            self.frozen_weights,
            self.trained_weights,
            self.gradients,
            self.optimizer,
        )
        return sum(parts) + (self.activations or 0)
