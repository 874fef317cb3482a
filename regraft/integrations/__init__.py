"""Vector stores of LangChain, LlamaIndex and Haystack that use a gallery; each needs its own extra."""
