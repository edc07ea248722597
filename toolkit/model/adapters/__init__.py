"""LoRA adapters: where they go, their files, and the ones that a run continues."""
