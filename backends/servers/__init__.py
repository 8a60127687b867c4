"""Servers: engines behind HTTP, asked with one request a case.

`openai:URL` opens any server that speaks OpenAI's completions, or a dialect of them.
"""
