"""The keys of what stands in the optimizer's state of a parameter, beside the state of its block."""

MOMENTUM = "momentum_buffer"
"""The key of the momentum, which is torch's."""
SECOND_MOMENT = "exp_avg_sq"
"""The key of Adam's average of squared gradients, as torch's Adam has it."""
ADAM_STEPS = "step"
"""The key of the number of gradients in that average, `[]`, as torch's Adam has it."""
PREFERENCE = "preference"
"""The key of what `SelectedUpdates` remembers of a layer, `[]`, at the first of its parameters."""
UPDATED = (MOMENTUM, SECOND_MOMENT, ADAM_STEPS, PREFERENCE)
"""The keys of the tensors that change with each update of the parameter, and are where it is updated."""
AVERAGE = "average"
"""The key of the average of the parameter's iterates, in float32 at least."""
AVERAGED_STEPS = "averaged_steps"
"""The key of the number of iterates in that average, below 0 while the model holds the average.

By the sign a checkpoint tells that the trained parameter belongs to it, also where that was not read.
"""
ITERATE = "iterate"
"""The key of the trained parameter, while the model holds the average."""
