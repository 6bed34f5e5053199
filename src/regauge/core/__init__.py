"""Parameters, groups, symmetries and their elements. This code needs only torch and scipy, and opens no files."""
