from .population_figures import map_figure as map_figure
from .population_figures import matrices_figure as matrices_figure
from .result_pages import write_page as write_page
