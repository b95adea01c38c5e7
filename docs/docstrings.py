"""What mkdocstrings has to know about this project's docstrings."""

import griffe


class Examples(griffe.Extension):
    """The section "Example:" is shown as code, as Google's style has it of "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Renames the section."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
