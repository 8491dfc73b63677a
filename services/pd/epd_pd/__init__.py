"""The PD service: pulls generate jobs, waits for their embeddings, has vLLM answer, sends frames."""
