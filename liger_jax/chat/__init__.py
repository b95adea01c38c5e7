"""Conversations as text: messages are checked, chat templates print them, and spans say which text the assistant wrote.

It knows messages, tools and Jinja, but no tokens, no files of data and no options of a run, and computes nothing.
"""
