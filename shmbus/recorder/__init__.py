"""The recorder: agents that speak to an OpenAI or Anthropic endpoint become rollout workers."""
