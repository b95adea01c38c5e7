"""Conversations as text: messages are checked, chat templates print them, and spans say who wrote what.

It knows messages, tools and Jinja. It knows no tokens, no files of data and no options of a run, and computes nothing.
"""
