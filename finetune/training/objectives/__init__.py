"""The losses of training objectives: from rows to the loss of a micro-batch."""
