"""The files beside an export's weights: configuration, generation settings, tokenizer, processors, licence."""
