"""Tokenizers, detokenization, chat templates and grammars."""
