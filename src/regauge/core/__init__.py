"""Parameters, groups, symmetries and their elements. This package needs only torch and scipy, and opens no files."""
