"""The tasks of `mtjax finetune`: in which files and fields their rows are, and by what they are judged."""
