"""The objectives: the losses that training minimises and how they are computed."""
