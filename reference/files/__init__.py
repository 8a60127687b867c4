"""Files: JSON and safetensors of cases and checkpoints, read within bounds."""
