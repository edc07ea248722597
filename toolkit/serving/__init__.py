"""From an export to a server: commands of vLLM and SGLang, files of llama.cpp and Ollama."""
