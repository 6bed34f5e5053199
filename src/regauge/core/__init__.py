"""Parameters, groups, symmetries and their elements: code that needs only torch and scipy, and opens no files."""
