"""A trained task becomes a bundle: the model in fp32, int8 and fp16, each proved equal to the task."""
