"""Export a trained task as a bundle: the model in fp32, int8 and fp16, each verified against the task."""
