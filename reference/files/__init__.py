"""Files: cases and checkpoint fields as JSON, tensors of safetensors, read within stated bounds."""
