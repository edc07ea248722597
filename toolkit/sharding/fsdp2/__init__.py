"""What the backend knows of FSDP2's own objects: records, states, replaced methods, tested versions."""
