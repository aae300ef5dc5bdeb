// Runs every MoE layer of a model directory or GGUF file from Rust, on several threads, and shows an
// error. Nothing but the standard library and conclave is needed:
//   rustc --edition 2021 -O main.rs -C linker=c++ \
//     $(for word in $(pkg-config --libs conclave) -lc; do echo "-C link-arg=$word"; done)
mod conclave;
mod ffi;

use conclave::{Checkpoint, Context, Layer, Result};

const TOKENS: usize = 8;

fn rows(layer: &Layer) -> Vec<f32> {
    (0..TOKENS * layer.hidden_size).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

fn run(path: &str) -> Result<()> {
    let context = Context::new()?;
    let checkpoint = Checkpoint::open(path)?;
    println!("conclave {}: {}", conclave::version(), checkpoint.model_type()?);
    for index in checkpoint.layers()? {
        let layer = Layer::from_checkpoint(&context, &checkpoint, index, TOKENS as i64)?;
        let hidden = rows(&layer);
        let mut out = vec![0.0f32; hidden.len()];
        layer.forward(&hidden, &mut out)?;
        let mut again = vec![0.0f32; hidden.len()];
        std::thread::scope(|threads| {
            threads.spawn(|| layer.forward(&hidden, &mut again)).join().expect("no panic")
        })?;
        assert!(out.iter().all(|value| value.is_finite()) && out.iter().any(|value| *value != 0.0));
        assert!(out == again, "a second forward has other bits");
        let sum: f32 = out.iter().map(|value| value.abs()).sum();
        println!(
            "layer {}: {} experts, mean magnitude {:.4}, {} tokens",
            index,
            layer.num_experts,
            sum / out.len() as f32,
            layer.tokens()?
        );
        // A row less than the input has.
        let len = out.len() - layer.hidden_size;
        match layer.forward(&hidden, &mut out[..len]) {
            Ok(()) => panic!("an output of {} rows was taken", TOKENS - 1),
            Err(error) => {
                assert!(error.status == ffi::ERROR_SHAPE);
                println!("  as it should, another shape ends in {}", error);
            }
        }
        assert!(layer.explain()?.contains("kernel"));
    }
    Ok(())
}

fn main() {
    let path = match std::env::args().nth(1) {
        Some(path) => path,
        None => {
            eprintln!("usage: main MODEL");
            std::process::exit(2);
        }
    };
    if let Err(error) = run(&path) {
        eprintln!("{}", error);
        std::process::exit(1);
    }
}
