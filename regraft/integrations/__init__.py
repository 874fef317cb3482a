"""Galleries as the vector stores of frameworks: LangChain, LlamaIndex and Haystack; each needs its own extra."""
