"""The files next to an export's weights: configuration, generation settings, tokenizer, processors, licence."""
