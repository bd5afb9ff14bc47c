"""The commands of `powerclip`, by subject: what is typed, in; what it runs, imported only then."""
