//! Plots as SVG: bars, and lines on logarithmic axes.

use std::fmt::Write;

use crate::figures::whole;

const WIDTH: f64 = 760.0;
const COLOURS: [&str; 8] = ["#1f6feb", "#d1495b", "#edae49", "#2a9d8f", "#7b5ea7", "#8d6e63", "#607d8b", "#9e9e9e"];

/// A plot and the name of its file, without `.svg`.
pub struct Plot {
    /// The file's name.
    pub file: String,
    title: String,
    kind: Kind,
}

enum Kind {
    Bars { unit: String, groups: Vec<(String, Vec<(String, f64)>)> },
    Lines { x: String, y: String, lines: Vec<(String, Vec<(f64, f64)>)> },
}

impl Plot {
    /// Bars from zero, in groups with a heading each.
    pub fn bars(file: &str, title: &str, unit: &str, groups: Vec<(String, Vec<(String, f64)>)>) -> Self {
        Self { file: file.into(), title: title.into(), kind: Kind::Bars { unit: unit.into(), groups } }
    }

    /// Lines through points; both axes are logarithmic. Points at or below zero are left out.
    pub fn lines(file: &str, title: &str, x: &str, y: &str, lines: Vec<(String, Vec<(f64, f64)>)>) -> Self {
        Self { file: file.into(), title: title.into(), kind: Kind::Lines { x: x.into(), y: y.into(), lines } }
    }

    /// The plot's SVG.
    pub fn svg(&self) -> String {
        match &self.kind {
            Kind::Bars { unit, groups } => self.draw_bars(unit, groups),
            Kind::Lines { x, y, lines } => self.draw_lines(x, y, lines),
        }
    }

    fn frame(&self, height: f64, body: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"system-ui, sans-serif\" font-size=\"13\" fill=\"#24292f\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{}{body}</svg>\n",
            text(16.0, 26.0, "start", "font-size=\"16\" font-weight=\"600\"", &self.title),
        )
    }

    fn draw_bars(&self, unit: &str, groups: &[(String, Vec<(String, f64)>)]) -> String {
        let highest =
            groups.iter().flat_map(|(_, bars)| bars).map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
        let longest = groups.iter().flat_map(|(_, bars)| bars).map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let left = 24.0 + 7.2 * longest as f64;
        let scale = (WIDTH - left - 110.0) / highest;
        let mut body = String::new();
        let mut y = 44.0;
        for (heading, bars) in groups {
            body += &text(16.0, y + 14.0, "start", "font-weight=\"600\" fill=\"#57606a\"", heading);
            y += 24.0;
            for (name, value) in bars {
                let colour = if name.starts_with("holdfast") { COLOURS[0] } else { "#afb8c1" };
                let width = (value * scale).max(1.0);
                body += &text(left - 8.0, y + 14.0, "end", "", name);
                let _ = writeln!(
                    body,
                    "<rect x=\"{left}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"18\" rx=\"2\" fill=\"{colour}\"/>"
                );
                body += &text(left + width + 6.0, y + 14.0, "start", "", &format!("{} {unit}", figure(*value)));
                y += 24.0;
            }
            y += 10.0;
        }
        self.frame(y + 6.0, &body)
    }

    fn draw_lines(&self, x_name: &str, y_name: &str, lines: &[(String, Vec<(f64, f64)>)]) -> String {
        let points = || lines.iter().flat_map(|(_, points)| points).filter(|(x, y)| *x > 0.0 && *y > 0.0);
        let x_axis = Axis::over(points().map(|(x, _)| *x), 70.0, WIDTH - 170.0);
        let y_axis = Axis::over(points().map(|(_, y)| *y), 340.0, 64.0);
        let mut body = String::new();
        for power in x_axis.powers() {
            let x = x_axis.place(power);
            let _ = writeln!(body, "<path d=\"M{x:.1} 64V340\" stroke=\"#eaeef2\"/>");
            body += &text(x, 358.0, "middle", "fill=\"#57606a\"", &figure(power));
        }
        for power in y_axis.powers() {
            let y = y_axis.place(power);
            let _ = writeln!(body, "<path d=\"M70 {y:.1}H{:.1}\" stroke=\"#eaeef2\"/>", WIDTH - 170.0);
            body += &text(62.0, y + 4.0, "end", "fill=\"#57606a\"", &figure(power));
        }
        body += &text(f64::midpoint(70.0, WIDTH - 170.0), 380.0, "middle", "fill=\"#57606a\"", x_name);
        body += &text(16.0, 48.0, "start", "fill=\"#57606a\"", y_name);
        for (index, (name, points)) in lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let placed = points.iter().filter(|(x, y)| *x > 0.0 && *y > 0.0);
            let placed: Vec<_> = placed.map(|(x, y)| (x_axis.place(*x), y_axis.place(*y))).collect();
            let path: Vec<_> = placed.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                body,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                path.join(" ")
            );
            for (x, y) in &placed {
                let _ = writeln!(body, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
            }
            let key = 76.0 + 22.0 * index as f64;
            let _ = writeln!(
                body,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{colour}\"/>",
                WIDTH - 150.0,
                key - 4.0
            );
            body += &text(WIDTH - 140.0, key, "start", "", name);
        }
        self.frame(392.0, &body)
    }
}

/// A logarithmic axis over whole powers of ten.
struct Axis {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, start: f64, end: f64) -> Self {
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return Self { from: 0.0, to: 1.0, start, end };
        }
        let from = low.log10().floor();
        Self { from, to: high.log10().ceil().max(from + 1.0), start, end }
    }

    fn place(&self, value: f64) -> f64 {
        self.start + (value.log10() - self.from) / (self.to - self.from) * (self.end - self.start)
    }

    fn powers(&self) -> impl Iterator<Item = f64> + use<> {
        (self.from as i32..=self.to as i32).map(|power| 10_f64.powi(power))
    }
}

fn text(x: f64, y: f64, anchor: &str, more: &str, content: &str) -> String {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{content}</text>\n")
}

fn figure(value: f64) -> String {
    match value {
        v if v >= 100.0 => whole(v),
        v if v >= 1.0 && v.fract() == 0.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 0.1 => format!("{v:.2}"),
        v => format!("{v}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithmic_axis_spans_whole_powers() {
        let axis = Axis::over([3.0, 400.0].into_iter(), 0.0, 100.0);
        assert_eq!(axis.powers().collect::<Vec<_>>(), [1.0, 10.0, 100.0, 1000.0]);
        assert!((axis.place(10.0) - 100.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn plot_without_points_is_valid() {
        assert!(Plot::lines("f", "t", "x", "y", vec![]).svg().ends_with("</svg>\n"));
    }
}
