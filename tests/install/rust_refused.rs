// The crate of Rust must not let these through: each case is compiled alone, and refused with the
// code that rust_crate.sh names. Without a case it compiles.
#![allow(
    dead_code,
    unused_imports,
    unused_mut,
    unused_assignments,
    unused_variables
)]
use conclave::*;

const SHAPE: [usize; 3] = [4, 8, 8];

fn source_of(data: &[f32]) -> Source<'_> {
    Source::new(&[("down", View::new(data, &SHAPE).unwrap())]).unwrap()
}

// Arrays end before the source that reads them.
#[cfg(case = "source")]
fn source() {
    let kept;
    {
        let data = vec![0.0f32; 256];
        kept = source_of(&data);
    }
    drop(kept);
}

// A packed layer has its own copy, and may live longer than its arrays.
fn packed(context: &Context, spec: &Spec) -> Layer {
    let data = vec![0.0f32; 256];
    let source = source_of(&data);
    Layer::new(context, spec, &source, LayerOptions::default()).unwrap()
}

// One that reads them where they are may not.
#[cfg(case = "in_place")]
fn in_place(context: &Context, spec: &Spec) {
    let layer;
    {
        let data = vec![0.0f32; 256];
        layer = Layer::in_place(context, spec, &source_of(&data), LayerOptions::default());
    }
    drop(layer);
}

fn refit_of_packed(layer: &Layer) {
    let mut refit = layer.refit(&RefitOptions::default()).unwrap();
    {
        let data = vec![0.0f32; 256];
        refit.stage(&source_of(&data)).unwrap();
    }
    refit.commit().unwrap();
}

// The commit would leave the layer with arrays that have ended.
#[cfg(case = "refit")]
fn refit_in_place<'w>(layer: &Layer<InPlace<'w>>) {
    let mut refit = layer.refit(&RefitOptions::default()).unwrap();
    {
        let data = vec![0.0f32; 256];
        refit.stage(&source_of(&data)).unwrap();
    }
    refit.commit().unwrap();
}

fn is_shared<T: Send + Sync>() {}
fn is_moved<T: Send>() {}
fn threads() {
    is_shared::<Layer>();
    is_shared::<Layer<InPlace<'static>>>();
    is_shared::<Recorder>();
    is_moved::<Refit>();
    is_moved::<Workspace>();
}

// One thread at a time uses a refit, and a workspace.
#[cfg(case = "refit_of_threads")]
fn refit_of_threads() {
    is_shared::<Refit>();
}
#[cfg(case = "workspace_of_threads")]
fn workspace_of_threads() {
    is_shared::<Workspace>();
}

// Two forwards at the same time cannot have one workspace.
#[cfg(case = "workspace")]
fn workspace<'a>(first: Call<'a>, second: Call<'a>, workspace: &'a mut Workspace) {
    let one = first.workspace(workspace);
    let other = second.workspace(workspace);
    drop((one, other));
}

// Nobody reads the rows that a forward writes meanwhile.
#[cfg(case = "out")]
fn out(data: &mut [f32]) {
    let out = ViewMut::new(data, &[1, 8]).unwrap();
    let call = Call::new(View::new(data, &[1, 8]).unwrap(), out);
    drop(call);
}

// A context on ranks, and what is made of it, stays where it was made: all of it uses one
// communicator.
fn ranks() {
    is_moved::<Communicator>();
    is_shared::<Context>();
}
#[cfg(case = "context_of_ranks")]
fn context_of_ranks() {
    is_moved::<Context<OnRanks>>();
}
#[cfg(case = "layer_of_ranks")]
fn layer_of_ranks() {
    is_moved::<Layer<Packed, OnRanks>>();
}
#[cfg(case = "refit_of_ranks")]
fn refit_of_ranks() {
    is_moved::<Refit<Packed, OnRanks>>();
}
#[cfg(case = "communicator_of_threads")]
fn communicator_of_threads() {
    is_shared::<Communicator>();
}

// The context has the communicator, which nobody else uses then.
#[cfg(case = "communicator_twice")]
fn communicator_twice(mut communicator: Communicator) {
    let context = Context::on_ranks(1, communicator).unwrap();
    communicator.barrier("mine").unwrap();
    drop(context);
}

fn refit_over(layer: &Layer, mut communicator: Communicator) {
    let mut refit = layer
        .refit_over(&RefitOptions::default(), &mut communicator)
        .unwrap();
    refit.stage(0, None).unwrap();
    refit.commit().unwrap();
    drop(refit);
    communicator.barrier("free again").unwrap();
}

// Until the refit ends the communicator is its own, and outlives it.
#[cfg(case = "communicator_of_refit")]
fn communicator_of_refit(layer: &Layer, mut communicator: Communicator) {
    let options = RefitOptions::default();
    let mut refit = layer.refit_over(&options, &mut communicator).unwrap();
    communicator.barrier("between").unwrap();
    refit.commit().unwrap();
}
#[cfg(case = "communicator_ends")]
fn communicator_ends(layer: &Layer, communicator: Communicator) {
    let refit;
    {
        let mut mine = communicator;
        refit = layer.refit_over(&RefitOptions::default(), &mut mine);
    }
    drop(refit);
}

// Weights that are read in place cannot come from a source that is gone.
#[cfg(case = "broadcast_in_place")]
fn broadcast_in_place<'w>(layer: &Layer<InPlace<'w>>, communicator: &mut Communicator) {
    let refit = layer.refit_over(&RefitOptions::default(), communicator);
    drop(refit);
}

// Ranks call a transport from several threads, and keep it.
#[cfg(case = "transport_of_one_thread")]
fn transport_of_one_thread() {
    struct Mine(std::rc::Rc<()>);
    impl own::Transport for Mine {
        fn start(&self, _: own::Operation) -> own::Outcome<()> {
            Ok(())
        }
        fn wait(&self, _: u64, _: std::time::Duration, _: &str) -> own::Outcome<Vec<Vec<u8>>> {
            Ok(Vec::new())
        }
        fn test(&self, _: u64) -> own::Outcome<bool> {
            Ok(true)
        }
        fn abort(&self, _: &str) {}
    }
}
#[cfg(case = "transport_ends")]
fn transport_ends(transport: impl own::Transport, name: &str) {
    let over = Communicator::over(transport, name, 0, 1, None);
    drop(over);
}
