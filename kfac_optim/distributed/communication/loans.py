"""The memory that a process group is lent for one message, and has no more once the message has ended.

[Note: what a group keeps] gloo carries a message out on a thread of its own, which lets go of the tensors of the
message a little after the message has ended. By then the rank that waited may have allocated its next buffers, and
holds more of them than its code says. So gloo gets no tensor of ours, but one that is made for the message on the same
memory, and is made empty when the message has ended. The memory itself is not touched: it is freed when our code holds
it no longer, and lives on where it is a parameter's, or that of a wrapper's bucket.

On accelerators a group gets our own tensors. There a message goes on in a stream after the host has waited, and the
group sees to it that the memory is not used for something else before the message has ended.
"""

from torch import Tensor


class Loan:
    """Lends tensors to a process group for one message, see [Note: what a group keeps]."""

    def __init__(self) -> None:
        self._lent: list[Tensor] = []

    def lend(self, tensor: Tensor) -> Tensor:
        """Return what the group is given in the place of a tensor: the same memory, until the loan has ended."""
        if tensor.device.type != "cpu":
            return tensor  # pragma: cuda
        # Not `detach`, whose result shares the version: nobody has written to the tensor when the loan ends.
        lent = tensor.data
        self._lent.append(lent)
        return lent

    def end(self) -> None:
        """Take back what was lent. To be called once the message has ended well: one that failed may still write."""
        for lent in self._lent:
            lent.set_()  # type: ignore[call-overload]
        self._lent.clear()
